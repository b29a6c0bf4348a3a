"""What serves comparisons only: programs of other designs that benchmarks time. Nothing else imports it."""
