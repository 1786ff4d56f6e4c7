"""Leave a simulated fleet alone with steady work for half an hour, and see whether anything grows.

`trainers` publish: by `submit`, through a relay, into a watched directory; `traffic` asks as rollout workers do;
`restarts` are what is ordinary in such a time; `look` samples every process, both Redis servers, the engines and the
store; `trend` and `verdicts` judge the samples; `drive` puts them together; `report` is what comes of it. Run it as
`tools/soak`.
"""
