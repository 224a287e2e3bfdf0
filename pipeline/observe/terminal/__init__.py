"""What a terminal shows: progress, summaries, top."""
