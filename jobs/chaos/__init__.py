"""Shows that nothing is lost and nothing done twice: workers are killed, frozen and cut off."""
