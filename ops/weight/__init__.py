"""What a weight of every product is: its two forms, its files. `terrazzo.ops.<product>` has its class."""
