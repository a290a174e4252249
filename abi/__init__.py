"""The stable C core, and the generator of everything that follows from its YAML."""
