"""From a plan to a launch: the driver, the launcher, the tables of arguments, and what is private to others."""
