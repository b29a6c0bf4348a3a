"""Decode attention: programs, plan and launch, codes of outputs, oracle."""
