"""Device library of all tile programs: primitives and their calls, persistent loops and rings, sums that CTAs share."""
