"""Units for hosts that run the fleet below systemd: what they say, and putting them in place."""
