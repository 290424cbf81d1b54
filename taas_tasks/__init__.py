"""What tasks and hosts run: stores, shards, preparation, delivery, launching, and Airflow's operators."""
