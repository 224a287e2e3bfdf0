"""Objects, local and in S3, and the files of a job's workspace."""
