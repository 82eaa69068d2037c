"""docker-compose.yml as it is run, by ``make test-compose``: it needs a Docker engine, so `make test` leaves it out."""
