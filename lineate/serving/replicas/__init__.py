"""Replicas of a model under Ray Serve: `lineate serve FOLDER --replicas 4`.

    client -> front (front.py) -> Ray Serve's handle and PrefixRouter (router.py, routing.py) -> replica (replica.py)

The front is the process of the command: it takes connections, passes each request to a replica and returns the answer.
A replica is a process of Ray with the whole server of `lineate serve`: engine, cache and OpenAI's API. Ray starts and
stops replicas, watches their health, scales them and transports messages between the processes.
"""
