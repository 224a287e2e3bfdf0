"""Kills, freezes and cuts off workers, to show that nothing is lost and nothing is done twice."""
