"""Hands Airflow the plugin class; everything is in ``taas_tasks.airflow.plugin``."""

from taas_tasks.airflow.plugin import TaasPlugin

__all__ = ["TaasPlugin"]
