# Debian's Prometheus on the base image of the services, for machines that reach no registry of images.
FROM python:3.11-slim
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus && rm -rf /var/lib/apt/lists/* \
 && install -d -o 65534 -g 65534 /prometheus
ENTRYPOINT ["/usr/bin/prometheus"]
