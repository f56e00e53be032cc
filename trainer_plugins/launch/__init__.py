"""Launch files and the launch environment: find, show, check, and compare with what runs."""
