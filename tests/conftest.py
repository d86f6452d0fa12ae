"""What all tests have in common."""

from hypothesis import HealthCheck, settings

# How long an example takes is the machine's affair: a busy one may stop for longer than any deadline.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
