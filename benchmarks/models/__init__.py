"""Networks for the demo and the measurements, each with its sizes as constructor arguments."""
