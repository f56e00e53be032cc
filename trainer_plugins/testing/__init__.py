"""Public test beds: an accelerator and a driver library without hardware, for our tests and for yours."""
