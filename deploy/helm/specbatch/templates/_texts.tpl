{{- /* A map as JSON, each of its values as a text. */ -}}
{{- define "texts" -}}
{{- $texts := dict -}}
{{- range $key, $value := . -}}
{{- $_ := set $texts $key (kindIs "string" $value | ternary $value (toJson $value)) -}}
{{- end -}}
{{- toJson $texts -}}
{{- end -}}
