"""What requests are placed on, and the one loop that places them."""
