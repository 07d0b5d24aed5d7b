"""Small programs that show how to use Headrace without importing it."""
