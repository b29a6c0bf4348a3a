"""Prefill attention: programs, plan and launch, oracle."""
