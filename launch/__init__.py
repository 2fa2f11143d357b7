"""Holds the commands; what they share is in `launch.lib`, what one figure or table needs in `launch.studies`."""
