"""What a command runs: sampling images, videos and texts, comparing with the serial twin, the demo page."""
