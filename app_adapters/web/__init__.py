"""Adapters of pools of worker processes: gunicorn, nginx; weights of a load balancer."""
