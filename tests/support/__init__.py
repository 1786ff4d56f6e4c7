"""What several tests need and no service does."""
