"""Storing new tokens: programs, plan and launch, oracle."""
