"""Other engines, each in its own interpreter, timed by themselves and asked over a pipe."""
