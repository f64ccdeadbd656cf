"""The golden vectors, and the script that makes them."""
