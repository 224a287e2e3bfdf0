"""Types that all folders share: spec, messages, records, tables, errors; imports none of them."""
