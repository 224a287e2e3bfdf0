"""What people look at: progress, summaries, token views."""
