"""The page that a coordinator serves: the fleet as it is and how it came to be so, for a person with a browser."""
