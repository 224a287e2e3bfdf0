"""What only the project itself runs. Not in the wheel."""
