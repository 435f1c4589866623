"""What all kinds of heads share on a device."""
