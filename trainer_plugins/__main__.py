"""`python -m trainer_plugins` is `trainer-plugins`."""

from trainer_plugins.cli import main

main()
