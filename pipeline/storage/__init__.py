"""Objects, local and in S3, and what a job's workspace holds."""
