"""Scripts that run outside of the tests' environment, where none of our packages is."""
