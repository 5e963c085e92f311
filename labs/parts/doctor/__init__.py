"""The doctor: what holds a training back that it has not written, and what each cure could give at most."""
