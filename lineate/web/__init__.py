"""The parts that the server and the explorer share: fields, errors, limits, connections, base files of pages."""
