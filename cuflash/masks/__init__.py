"""Which keys a query may attend to."""
