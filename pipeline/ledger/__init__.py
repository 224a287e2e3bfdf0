"""The store: jobs, groups, leases, completions, costs. `sql/` alone speaks SQL."""
