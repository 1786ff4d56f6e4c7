"""What an operator's Prometheus and Grafana are given: names, alert rules and a dashboard, all from one table.

`python -m adaptersync_tools.observing` writes them into `deploy/`.
"""
