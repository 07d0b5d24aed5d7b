"""What the documentation's site is made with: generated pages, and the changes that links need."""
