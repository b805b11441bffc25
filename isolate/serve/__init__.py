"""What a server does with its slots, and tables of how that ends under different treatments."""
