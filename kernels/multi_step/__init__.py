"""Several passes in one call: drafts of a draft model, tokens of a verifier without drafts."""
