"""The store: jobs, groups, leases, completions, costs. The only room that speaks SQL."""
