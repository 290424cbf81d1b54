"""Settings of the property tests."""

from hypothesis import HealthCheck, settings

# A busy machine is slow now and then; that is no failure of a property.
settings.register_profile("taas", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("taas")
