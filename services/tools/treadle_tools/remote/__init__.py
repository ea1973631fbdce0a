"""Tools, rewards, judges and GPU services that are called over HTTP: how they are declared and
called."""
