"""``multiattn tune``: what may run a problem compiled, checked against the truth and timed, on the user's own GPU."""
