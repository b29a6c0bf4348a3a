"""What quantizers of all formats share."""
