"""Every target architecture without the hardware: Plans compiled, their cubins read, the roofline above them."""
