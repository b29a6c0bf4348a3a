"""One path of calls for all linear layers: what a kind of weight differs in, it hands in."""
