"""Library and command line of Ebbtide: policies, messages, REST parts, matcher, simulator, client, lab and demo."""
