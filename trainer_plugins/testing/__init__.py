"""Public test beds: an accelerator and a driver library without hardware."""
